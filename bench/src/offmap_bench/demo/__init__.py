"""`offmap demo`: five methods and an honest rival on three data sets, as a table and a page."""
