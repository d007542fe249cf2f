"""The console: a page on the admin port that shows the world move, and what it is told, second by second."""
