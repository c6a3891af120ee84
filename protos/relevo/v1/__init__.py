"""Package relevo.v1."""
