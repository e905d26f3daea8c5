"""Components of one's own: a subclass of about ten lines each, given to the library as its own parts are.

Each file runs alone in seconds and prints what came of it, such as `python -m examples.own_components.loss`.
"""
