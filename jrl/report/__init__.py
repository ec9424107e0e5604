"""Reports: plots, and HTML pages of one run or of several.

page      curves and samples of one run, from its directory
health    what asks for a look, and how each number moved
samples   which samples a page holds
overlay   several runs over each other
"""
