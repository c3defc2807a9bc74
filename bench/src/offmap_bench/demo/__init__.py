"""`offmap demo`: five methods and an honest baseline on three data sets, as a table and a page."""
