"""``python3 -m dtlab``: the commands from a bare clone. Any Python 3 can read this file, to be told in one sentence."""

import sys

if sys.version_info < (3, 10):
    import shutil

    newer = [name for name in ("python3.%d" % minor for minor in (13, 12, 11, 10)) if shutil.which(name)]
    cure = "this machine has %s" % newer[0] if newer else "install a newer one"
    sys.exit(
        "dtlab needs Python 3.10 or newer and %s is %d.%d: %s, then run: make lab PYTHON=%s"
        % (sys.executable, sys.version_info[0], sys.version_info[1], cure, newer[0] if newer else "python3.12")
    )

from dtlab.cli import main

sys.exit(main())
