"""Rules about past tokens. Each module has a rule and its option.

NumPy is imported when a rule runs, because the command line needs only the declarations.
"""
