"""One file per method, the same order in each: Config, then `fit(nets, train, valid, ...) -> Predictive`."""
