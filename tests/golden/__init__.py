"""Golden records: numbers of many small fits, kept so that a change of the code cannot change them unseen."""
