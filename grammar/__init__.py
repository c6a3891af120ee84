"""What an output must match, and which tokens keep it matching; no other room sees the library."""
