"""Settings of Sphinx for the site; `scripts.website` copies this file beside the pages."""

from recorder import __version__

project = "recorder"
version = release = __version__
author = copyright = ""
html_show_copyright = html_show_sphinx = False
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "index"
default_role = "code"  # a single backtick in a docstring is code
smartquotes = False  # "--option" stays two hyphens
highlight_language = "text"

# Anchors are those that the repository's own pages use, so that one link serves both.
myst_heading_anchors = 4
suppress_warnings = ["myst.header", "misc.highlighting_failure"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
python_maximum_signature_line_length = 100
toc_object_entries_show_parents = "hide"

man_pages = [("reference/commands", "recorder", "asks and steers what recorder has recorded", "", 1)]

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = f"recorder {__version__}"
html_copy_source = html_show_sourcelink = False
html_show_search_summary = False  # a page that was opened from a disk may not fetch the others
html_theme_options: dict[str, object] = {"top_of_page_buttons": []}
pygments_style, pygments_dark_style = "friendly", "monokai"
