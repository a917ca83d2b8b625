"""Reports on training as pages of HTML that need nothing else: `page` lays them out, `charts` draws."""
