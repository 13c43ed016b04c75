"""Run time: everything the server needs, and nothing else; copied into output/."""
