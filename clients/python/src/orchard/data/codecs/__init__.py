"""One module for each family of formats; `orchard.data.registry` lists them."""
