"""`osora data meta` and `osora data check`, and the table that a command reads."""
