"""What is written down: the run document, the machine it was measured on, and where documents are kept."""
