"""The command line ``deepinfer``."""
