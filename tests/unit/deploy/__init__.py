"""What is shipped to run Relevo elsewhere."""
