"""The console: a page on the admin port that shows the fleet's state second by second, and accepts operators' actions."""
