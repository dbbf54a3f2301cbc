"""Where rows come from: finding files, reading their formats, copying them from an address."""
