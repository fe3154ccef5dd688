"""The algorithms of the attention family as their papers print them, on a memory that counts every element moved.

Nothing here is fast. Each module holds one idea, with its source and its exact traffic in the docstring.
"""
