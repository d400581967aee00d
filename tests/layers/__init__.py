"""Live layers against the plain-torch references of their specs."""
