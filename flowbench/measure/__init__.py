"""How one sitting measures: who runs when, in which processes, by which clock, and what memory they took."""
