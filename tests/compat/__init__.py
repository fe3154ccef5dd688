"""Other libraries' functions and their conventions."""
