"""Projector mode: text of at least 18 px and figures over the full width."""
from dtlab import shell

_ID = "dtlab-present"
_CSS = """
.jp-Notebook { --jp-content-font-size1: 20px; --jp-code-font-size: 18px; --jp-ui-font-size1: 18px;
               --jp-widgets-font-size: 20px; --jp-widgets-inline-height: 34px; --jp-notebook-max-width: 100%;
               --dtlab-zoom: 1.6; }
.jp-Notebook .jp-RenderedHTMLCommon, .jp-Notebook .widget-radio-box label { font-size: 20px; line-height: 1.5; }
.jp-Notebook .jp-OutputArea pre, .jp-Notebook .jp-RenderedHTMLCommon table, .jp-Notebook .cm-editor { font-size: 18px; }
.jp-Notebook .jp-RenderedSVG img, .jp-Notebook .jp-RenderedSVG svg, .jp-Notebook .jp-RenderedImage img
  { width: 100%; height: auto; }
.jp-Notebook .jp-OutputArea-output { overflow-x: auto; }
"""  # figures are 650 units wide with labels of at least 12: 18 px from 975 px upward, less in a narrower notebook


def present(on=True):
    """Switch projector mode on (or off, ``present(False)``) for this notebook; run it again to change it."""
    if not shell.in_notebook():
        print("projector mode works in a notebook with a screen")
        return
    from IPython.display import HTML, display

    style = f"<style id='{_ID}'>{_CSS}</style>" if on else ""
    told = "on: dtlab.present(False) ends it; with the sidebar closed (Ctrl B) figures are larger" if on else "off"
    display(HTML(f"{style}<p>Projector mode is {told}.</p>"))
