"""The in-distribution interfaces of other libraries, each imported only when asked for."""
