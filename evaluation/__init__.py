"""How tokens are measured: questions, runs, answers, metrics, tables, figures. Imports `model/`, never the reverse."""
