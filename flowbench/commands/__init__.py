"""What each command does: reads files, has things measured or judged, writes, and returns what is to be printed."""
