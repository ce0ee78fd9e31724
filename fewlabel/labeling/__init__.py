"""Labels by people: which images to label next, the page on which they do it, and the table of their answers."""
