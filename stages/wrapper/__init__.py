"""How a stage is run and recorded: its definition, its place, its process, its record."""
