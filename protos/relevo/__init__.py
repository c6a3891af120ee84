"""Generated stubs of Relevo's protos."""
