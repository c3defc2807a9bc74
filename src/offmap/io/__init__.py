"""Guard files and what keeps them whole: written atomically, read without running code."""
