"""Truth first, then agreement of the two backends.

"Catalogue 13" and "field case B1" in docstrings are labels: of a list of values known in closed form or by
enumeration, and of a list of faults that people met in public when they did this job.
"""
