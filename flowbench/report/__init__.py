"""Reports: facts of a run document, as text for people and for other tools."""
