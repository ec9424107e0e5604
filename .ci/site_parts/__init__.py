"""Parts of the site's builder, .ci/site.py."""
