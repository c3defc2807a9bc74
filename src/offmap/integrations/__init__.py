"""The familiar interfaces of other libraries, each imported only when asked for."""
