"""The cookbook: one recipe a file, each with a small setting for two CPU cores and a real one for a GPU.

`python -m examples.cookbook.<recipe> --help` says what a recipe teaches and how it is set. Every recipe shows its
progress, appends each step's numbers to `curves.jsonl` in its output folder, and draws them in `curves.png`.
"""
