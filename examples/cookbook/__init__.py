"""The cookbook: one recipe per file, each with a small setting for two CPU cores and a realistic one for a GPU.

`python -m examples.cookbook.<recipe> --help` describes a recipe and its options. Every recipe shows its progress,
writes the numbers of each step to `curves.jsonl` in its output folder, and plots them in `curves.png`. `four_tenants`
writes these files to one subfolder per run.
"""
