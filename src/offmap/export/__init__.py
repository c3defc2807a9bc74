"""What leaves the library: frozen draws in one graph, for other runtimes."""
