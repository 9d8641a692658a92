"""Rules about the tokens that came before, a module each: its option and what it does.

NumPy is imported when a rule runs: the command line reads the declarations alone.
"""
