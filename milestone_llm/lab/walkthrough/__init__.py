"""A debugger session that carries its own guide, on pdb."""
