"""Build time: one module per make target, plus the few that they share."""
