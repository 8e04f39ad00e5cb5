"""Tables that age: each row has its date and its source. Edit them, or give files of your own on the command line."""
