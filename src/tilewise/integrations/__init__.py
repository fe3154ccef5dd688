"""Other libraries' attention, computed here: each module registers with one library and changes none of its code."""
