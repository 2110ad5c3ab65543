"""Tables of an experiment, with their notes, in the terminal, CSV, Markdown and LaTeX."""
