"""Custom components: subclasses of about ten lines that are used like the library's components.

Each file is a program that runs in seconds and prints its result, for example
`python -m examples.own_components.loss`.
"""
