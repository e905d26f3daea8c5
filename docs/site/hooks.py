"""Hooks of MkDocs, which `mkdocs.yml` names: they add the pages from outside docs/ and the generated pages."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs.site.decisions import decisions_page
from docs.site.links import InvalidLink, LinkRewriter

ROOT = Path(__file__).resolve().parents[2]
"""Top of the repository."""
IMPORTED = {
    'architecture.md': 'ARCHITECTURE.md',
    'changelog.md': 'CHANGELOG.md',
    'contributing.md': 'CONTRIBUTING.md',
    'cookbook.md': 'examples/cookbook/README.md',
    'deployment.md': 'deploy/README.md',
    'overview.md': 'README.md',
}
"""Files outside docs/ that are pages of the site, by their path on the site."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add imported and generated pages."""
    pages = {page: (ROOT / source).read_text(encoding='utf-8') for page, source in IMPORTED.items()}
    pages['adr/index.md'] = decisions_page(ROOT / 'docs' / 'adr')
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page."""
    sources = {file.src_uri: f'docs/{file.src_uri}' for file in files} | IMPORTED
    rewriter = LinkRewriter(ROOT, sources, config.extra['source_url'])
    try:
        return rewriter.rewrite(markdown, page.file.src_uri)
    except InvalidLink as error:
        raise PluginError(str(error)) from None
