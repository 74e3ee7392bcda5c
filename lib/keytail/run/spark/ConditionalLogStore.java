package keytail;

import io.delta.storage.S3SingleDriverLogStore;
import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.FileAlreadyExistsException;
import java.util.Arrays;
import java.util.Iterator;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.FSDataInputStream;
import org.apache.hadoop.fs.FSDataOutputStream;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.fs.Path;

/**
 * Delta's log store for S3, except that a commit is created by one conditional request (If-None-Match: *). If several
 * drivers create the same commit, one of them succeeds, and Delta repeats the commits of the others with a new version.
 *
 * s3_commits.py compiles this file with Janino, which is a part of Spark and ignores type parameters.
 */
public class ConditionalLogStore extends S3SingleDriverLogStore {
    public ConditionalLogStore(Configuration conf) {
        super(conf);
    }

    public void write(Path path, Iterator<String> actions, Boolean overwrite, Configuration conf) throws IOException {
        if (overwrite.booleanValue()) {
            super.write(path, actions, overwrite, conf);
            return;
        }
        StringBuilder lines = new StringBuilder();
        while (actions.hasNext()) {
            lines.append((String) actions.next()).append('\n');
        }
        byte[] commit = lines.toString().getBytes(StandardCharsets.UTF_8);
        FileSystem store = path.getFileSystem(conf);
        try {
            create(store, path, commit);
        } catch (IOException problem) {
            // The request may have succeeded, and only its response was lost. Commits contain random ids: if the stored
            // commit has the same bytes, it is this commit. If it has other bytes, this commit can never succeed.
            byte[] found = null;
            try {
                found = read(store, path);
            } catch (IOException unknown) {
                problem.addSuppressed(unknown);
                throw problem;
            }
            if (!Arrays.equals(found, commit)) {
                throw new FileAlreadyExistsException(path.toString());
            }
        }
    }

    private static void create(FileSystem store, Path path, byte[] commit) throws IOException {
        FSDataOutputStream file =
            (FSDataOutputStream) store.createFile(path).must("fs.option.create.conditional.overwrite", true).build();
        try {
            file.write(commit);
        } catch (IOException problem) {
            file.abort(); // close() would create the object with a part of the commit
            throw problem;
        }
        file.close();
    }

    private static byte[] read(FileSystem store, Path path) throws IOException {
        FSDataInputStream file = store.open(path);
        try {
            return file.readAllBytes();
        } finally {
            file.close();
        }
    }
}
