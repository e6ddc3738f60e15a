"""What a notebook shows that reacts: questions and the projector mode. Only this package imports ipywidgets."""
