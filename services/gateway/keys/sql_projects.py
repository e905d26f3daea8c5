"""Projects in SQL."""

from collections.abc import Sequence

from sqlalchemy import ColumnElement

from services.gateway.keys.project import Project
from services.gateway.keys.tables import ProjectRow
from services.gateway.paging import Page
from services.gateway.store.database import Database
from services.gateway.store.statements import (
    as_row,
    fetch_all,
    fetch_one,
    insert_into,
    newest_first,
    select_values,
)


class SqlProjectStore:
    """Keeps projects."""

    def __init__(self, database: Database) -> None:
        """Keep them in `database`."""
        self._database = database

    async def add_if_absent(self, project: Project) -> Project:
        """Keep the project, or leave the tenant's one of that id as it is; return what is kept."""
        query = select_values(ProjectRow, Project).where(_is_it(project.tenant_id, project.project_id))
        async with self._database.write() as connection:
            insert = insert_into(connection, ProjectRow).values(as_row(project))
            await connection.execute(insert.on_conflict_do_nothing(index_elements=['tenant_id', 'project_id']))
            return await fetch_one(connection, query, Project) or project

    async def get(self, tenant_id: str, project_id: str) -> Project | None:
        """Return the tenant's project, or None."""
        query = select_values(ProjectRow, Project).where(_is_it(tenant_id, project_id))
        async with self._database.read() as connection:
            return await fetch_one(connection, query, Project)

    async def list_newest(self, tenant_id: str, page: Page) -> Sequence[Project]:
        """Return one item more than the page where there are as many, newest first."""
        query = select_values(ProjectRow, Project).where(ProjectRow.tenant_id == tenant_id)
        query = newest_first(query, page, time=ProjectRow.create_time, item_id=ProjectRow.project_id)
        async with self._database.read() as connection:
            return await fetch_all(connection, query, Project)


def _is_it(tenant_id: str, project_id: str) -> ColumnElement[bool]:
    return (ProjectRow.tenant_id == tenant_id) & (ProjectRow.project_id == project_id)
