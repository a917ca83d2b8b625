"""Reports on training as self-contained HTML pages: `page` lays them out, `charts` draws the charts."""
