import { fileURLToPath } from 'node:url';
import ts from 'typescript';
import { expect, test } from 'vitest';

/** Returns whether a node is a declaration with one name, a call, or the word `any`. */
const isTyped = (node: ts.Node): boolean =>
  ((ts.isVariableDeclaration(node) || ts.isParameter(node) || ts.isBindingElement(node)) &&
    ts.isIdentifier(node.name)) ||
  ts.isPropertyDeclaration(node) ||
  ts.isPropertySignature(node) ||
  ts.isCallExpression(node) ||
  node.kind === ts.SyntaxKind.AnyKeyword;

const path = (name: string): string => fileURLToPath(new URL(`../${name}`, import.meta.url));

test('no call or declaration of the package has the type any', () => {
  const { config } = ts.readConfigFile(path('tsconfig.json'), ts.sys.readFile) as { config: object };
  const { options } = ts.parseJsonConfigFileContent(config, ts.sys, path('.'));
  const program = ts.createProgram([path('src/index.ts'), path('src/platform/web.ts')], options);
  const checker = program.getTypeChecker();
  const found: string[] = [];
  let count = 0;
  const visit = (file: ts.SourceFile, node: ts.Node): void => {
    if (isTyped(node)) {
      count += 1;
      if (checker.getTypeAtLocation(node).flags & ts.TypeFlags.Any) {
        const { line } = file.getLineAndCharacterOfPosition(node.getStart(file));
        found.push(`${file.fileName}:${line + 1}: ${node.getText(file)}`);
      }
    }
    ts.forEachChild(node, (child) => visit(file, child));
  };
  const files = program.getSourceFiles().filter(({ fileName }) => fileName.startsWith(path('src/')));
  files.filter(({ fileName }) => !fileName.includes('/gen/')).forEach((file) => visit(file, file));
  expect(found).toEqual([]);
  expect(count).toBeGreaterThan(300);
}, 120_000);
