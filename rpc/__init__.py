"""The control plane: gRPC servers and channels between our processes."""
