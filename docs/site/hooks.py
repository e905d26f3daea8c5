"""Hooks of MkDocs, which `mkdocs.yml` names: they add the pages from outside docs/ and the generated pages."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs.site.api_pages import ApiPages, contract_pages
from docs.site.commands import commands_page
from docs.site.configuration import configuration_page
from docs.site.contracts import read_contracts
from docs.site.decisions import decisions_page
from docs.site.error_page import error_page
from docs.site.library import library_pages
from docs.site.links import InvalidLink, LinkRewriter
from docs.site.metrics import metrics_page

ROOT = Path(__file__).resolve().parents[2]
"""Root folder of the repository."""
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
    for page, text in {**_imported_pages(), **generated_pages()}.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Mark the tables of reference pages, whose rows the style sheet shows as blocks in a narrow window."""
    del config, files
    if not page.file.src_uri.startswith('reference/'):
        return html
    return html.replace('<table>', '<div class="stacked"><table>').replace('</table>', '</table></div>')


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page that is not generated, and give the code of tutorials the width of the outline."""
    if page.file.src_uri.startswith(('learn/', 'do/')):
        page.meta['hide'] = ['toc']
    if page.file.src_uri not in IMPORTED and not (ROOT / 'docs' / page.file.src_uri).is_file():
        return markdown
    sources = {file.src_uri: f'docs/{file.src_uri}' for file in files} | IMPORTED
    source_url = str(config.extra['source_url'])  # pyright: ignore[reportUnknownArgumentType]
    rewriter = LinkRewriter(ROOT, sources, generated=contract_pages(ROOT / 'protos'), source_url=source_url)
    try:
        return rewriter.rewrite(markdown, page.file.src_uri)
    except InvalidLink as error:
        raise PluginError(str(error)) from None


def generated_pages() -> dict[str, str]:
    """Return the Markdown of each generated page by its path on the site."""
    contracts = read_contracts(ROOT / 'protos')
    return {
        **ApiPages(contracts, ROOT).pages(),
        **library_pages(ROOT / 'sdk' / 'python'),
        'adr/index.md': decisions_page(ROOT / 'docs' / 'adr'),
        'reference/commands.md': commands_page(),
        'reference/configuration.md': configuration_page(),
        'reference/errors.md': error_page(contracts, ROOT),
        'reference/metrics.md': metrics_page(),
    }


def _imported_pages() -> dict[str, str]:
    return {page: (ROOT / source).read_text(encoding='utf-8') for page, source in IMPORTED.items()}
