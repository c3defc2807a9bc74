"""The guard: detect with the wide distribution, predict with the clipped one, and say how sure the verdict is."""
