"""The console: a page on the admin port that shows the fleet's state every second and accepts operators' actions."""
